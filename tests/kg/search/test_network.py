"""The prover network: worked examples, and equality of the ways to compute the same output."""

import dataclasses

import pytest
import torch
from torch.func import grad

from funcppo import interfaces
from funcppo.core import tree
from funcppo.kg.logic.resolve import Goals
from funcppo.kg.search import env as prover_env
from funcppo.kg.search import network as net
from tests.kg.search import small_tasks
from tests.learning import on_gpu


def test_the_entropy_bonus_is_the_negative_kl_to_the_prior():
    """By hand for two actions and a masked one; 0 for an untrained policy."""
    lowest = torch.finfo(torch.float32).min
    out = net.ProverOutput(
        logits=torch.tensor([[0.0, torch.tensor(3.0).log(), lowest]]),
        prior_logits=torch.tensor([[0.0, 0.0, lowest]]),
        value=torch.zeros(1),
    )
    want = -(0.25 * torch.tensor(0.5).log() + 0.75 * torch.tensor(1.5).log())
    torch.testing.assert_close(interfaces.negative_kl_to_prior(out), want[None])
    cfg, world, state = small_tasks.small_problem()
    obs = prover_env.observe(cfg.env.cfg, world, state.env_state)
    untrained = cfg.agent.apply(cfg.agent.cfg, world, state.params, obs)
    assert not interfaces.negative_kl_to_prior(untrained).any()
    assert untrained.prior_logits.any()


def test_rows_within_capacity_are_scored_as_without_a_capacity_and_others_are_flagged():
    """1e-6 of float32 sums; room for the first half of them, and then for all."""
    cfg, world, state = small_tasks.small_problem()
    _, (plain, _, params, obs) = small_tasks.network_call(cfg, world, state)
    want, valid = (
        cfg.agent.apply(plain, world, params, obs),
        int(obs.action_mask[:, :-1].sum()),
    )
    for capacity in (valid // 2, valid):
        packing = dataclasses.replace(plain, capacity=capacity)
        got, fits = (
            cfg.agent.apply(packing, world, params, obs),
            ~net.exceeds_capacity(packing, obs.action_mask),
        )
        room = obs.action_mask[:, :-1].sum(1).cumsum(0) <= capacity
        assert torch.equal(fits, room) and room.any()
        for a, b in zip(got, want):
            torch.testing.assert_close(a[room], b[room], rtol=0, atol=1e-6)


@pytest.mark.parametrize("hidden_dim", [64, 8])
def test_rules_embedded_once_equal_successors_as_written(hidden_dim):
    """Outputs and gradients, of untidy params and of states with hopeless rules, missing ones and others.

    As products with a table of all rules where that is less than vectors of each state's, and as vectors.
    """
    cfg, world, state = small_tasks.small_problem(
        name="family_tree:40:3", max_height=1, hidden_dim=hidden_dim
    )
    as_table = cfg.env.cfg.resolve.max_successors * hidden_dim >= 2 * (
        1 + cfg.agent.cfg.sizes.n_rules
    )
    assert as_table == (hidden_dim == 64)
    params = small_tasks.perturbed(state.params)
    shared = prover_env.observe(cfg.env.cfg, world, state.env_state)
    rule = shared.rule.long()[..., None, None]
    body = torch.where(rule >= 0, world.kb.rules[:, 1:][shared.rule.long()], 0)
    each = shared._replace(
        successors=Goals(body, torch.ones_like(body[..., 0]))
    )
    legal = shared.action_mask[:, :-1]
    assert not shared.successors.atoms.numel()
    assert (shared.dead_end & legal).any()
    assert (~shared.dead_end & legal).any()
    assert not legal.all()

    def found(obs):
        leaves = [x.clone().requires_grad_() for x in tree.leaves(params)]
        out = cfg.agent.apply(
            cfg.agent.cfg, world, tree.unflatten(params, leaves), obs
        )
        (
            torch.log_softmax(out.logits, -1)[:, 0] + out.value**2
        ).mean().backward()
        grads = [
            torch.zeros_like(x) if x.grad is None else x.grad for x in leaves
        ]
        return [out.logits.detach(), out.value.detach(), *grads]

    for got, want in zip(found(shared), found(each)):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def test_the_prior_of_a_rule_is_the_log_odds_of_its_clipped_confidence():
    """By hand: two rules with confidences 3/4 and 1; without the query 2/3 and 1; a fact has logit 0."""
    kb = small_tasks.small_task().kb._replace(
        support=torch.tensor([3.0, 2.0]), body_pairs=torch.tensor([4.0, 2.0])
    )
    assert net.kbase.rule_confidence(kb).tolist() == [0.75, 1.0]
    rule = torch.tensor([[-1, 0, 1], [-1, 0, 1]], dtype=torch.int32)
    logits = net.rule_prior_logits(kb, rule, torch.tensor([[False], [True]]))
    confidence = torch.tensor([[0.75, 1.0], [2 / 3, 1.0]], dtype=torch.float64)
    clipped = 0.01 + 0.98 * confidence
    expected = torch.log(clipped / (1 - clipped))
    assert logits[:, 0].tolist() == [0.0, 0.0]
    torch.testing.assert_close(
        logits[:, 1:].double(), expected, rtol=0, atol=1e-5
    )


def test_an_untrained_network_outputs_its_prior_and_value_zero():
    fn, args = small_tasks.network_call(*small_tasks.small_problem())
    out = fn(*args)
    assert torch.equal(out.logits, out.prior_logits) and not out.value.any()
    obs = args[-1]
    assert not out.logits[:, -1].any()
    assert not out.logits[:, :-1][
        (obs.rule < 0) & obs.action_mask[:, :-1]
    ].any()
    lowest = torch.finfo(torch.float32).min
    assert (out.logits[~args[-1].action_mask] == lowest).all()
    assert (out.logits[args[-1].action_mask] > -10).all()


@on_gpu
@pytest.mark.parametrize("n_rows", [9, 285])
def test_gradients_of_lookups_are_added_up_in_a_fixed_order(n_rows):
    """Those of `embedding` are not where there are thousands of lookups, most of them of one row."""
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(n_rows, (12_160,), generator=generator).int()
    is_first = torch.rand(len(index), generator=generator) < 0.6
    index = torch.where(is_first, 0, index).cuda()
    table = torch.randn((n_rows, 32), generator=generator).cuda()
    against = torch.randn((len(index), 32), generator=generator).cuda()

    def product(table):
        return (net._look_up(table, index) * against).sum()

    first = grad(product)(table)
    exact = torch.zeros(n_rows, 32, dtype=torch.float64)
    exact = exact.index_add(0, index.cpu(), against.cpu().double())
    torch.testing.assert_close(
        first.cpu().double(), exact, rtol=1e-4, atol=1e-3
    )
    for _ in range(100):
        assert torch.equal(grad(product)(table), first)
