# pyright: standard
"""Triton kernels written by hand; a CUDA build of PyTorch is needed.

`sum_products_kernel` serves the messages of path networks, which neither libraries nor Inductor do well.

`memories_kernel` and `adjoints_kernel` serve `nets.cells`: a program has some rows, and takes them through all steps.

The others serve `nets.fused_mlp`. A program has a learner, the actor or the critic of it, and some of its rows. It
holds the weights of that stack of layers, and takes a tile of rows at a time through all of them. Sizes are padded with
zeros to powers of two, which products on tensor cores need. Of observations with more than X numbers, a program takes X
of each row at a time.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from triton.language.extra import libdevice  # pyright: ignore[reportMissingImports]


def _sum_products_kernel(
    offsets,
    left_row,
    right_row,
    edge,
    is_kept,
    left,
    right,
    out,
    width,
    columns: tl.constexpr,
    has_right: tl.constexpr,
    has_mask: tl.constexpr,
    dtype: tl.constexpr,
):
    """Sum products of rows by part: out[p] = sum over i of part p of left[left_row[i]] * right[right_row[i]].

    Without a right, out[p] is the sum of left[i]. With a mask, products of edges that are not kept are left out.

    A program has some columns of a part. Programs that run together have the same columns, so that what they read
    of the rows stays in the cache.
    """
    part = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    is_column = column < width
    total = tl.zeros([columns], dtype=dtype)
    for i in range(tl.load(offsets + part), tl.load(offsets + part + 1)):
        if has_right:
            place = tl.load(left_row + i) * width + column
            x = tl.load(left + place, is_column, 0.0).to(dtype)
            place = tl.load(right_row + i) * width + column
            product = x * tl.load(right + place, is_column, 0.0).to(dtype)
            if has_mask:
                kept = tl.load(is_kept + tl.load(edge + i))
                product = product * kept.to(dtype)
            total += product
        else:
            row = left + i * width
            total += tl.load(row + column, is_column, 0.0).to(dtype)
    tl.store(out + part * width + column, total, is_column)


sum_products_kernel: Any = triton.jit(_sum_products_kernel)


# ---- Multilayer perceptrons of two hidden layers, for `nets.fused_mlp`.


@triton.jit
def _product(a, b, precision: tl.constexpr):
    if precision == "bfloat16":
        product = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16))
    else:
        product = tl.dot(a, b, input_precision=precision)
    return product


@triton.jit
def _activate(x, is_tanh: tl.constexpr):
    """Compute relu, or tanh by a fast exponential, with an absolute error like that of numbers near 1."""
    if is_tanh:
        whole = libdevice.fast_expf(2.0 * x) + 1.0
        return 1.0 - 2.0 * libdevice.fast_dividef(1.0, whole)
    return tl.maximum(x, 0.0)


@triton.jit
def _slope(y, is_tanh: tl.constexpr):
    """Compute the derivative of the activation where its output is y."""
    if is_tanh:
        return 1.0 - y * y
    return (y > 0).to(tl.float32)


@triton.jit
def _load_columns(
    place, height, width, stride, H: tl.constexpr, W: tl.constexpr
):
    """Load some columns of a matrix in memory, padded with zeros to [H, W]; its rows are `stride` apart."""
    i = tl.arange(0, H)[:, None]
    j = tl.arange(0, W)[None, :]
    return tl.load(place + i * stride + j, (i < height) & (j < width), 0.0)


@triton.jit
def _load(place, height, width, H: tl.constexpr, W: tl.constexpr):
    """Load a matrix [height, width] from memory, padded with zeros to [H, W]."""
    return _load_columns(place, height, width, width, H, W)


@triton.jit
def _store(place, x, height, width, H: tl.constexpr, W: tl.constexpr):
    """Store the first `height` rows and `width` columns of a matrix [H, W]."""
    i = tl.arange(0, H)[:, None]
    j = tl.arange(0, W)[None, :]
    tl.store(place + i * width + j, x, (i < height) & (j < width))


@triton.jit
def _layer(place, stack, stride, n_in, n_out):
    """Return the address where the weights of a stack of layers begin."""
    return place + stack // 2 * stride + stack % 2 * (n_in * n_out)


@triton.jit
def _load_layer(
    place, stack, stride, n_in, n_out, I: tl.constexpr, O: tl.constexpr
):
    """Load the first rows of the weights of a stack of layers, or its bias, which has a single row."""
    return _load(_layer(place, stack, stride, n_in, n_out), n_in, n_out, I, O)


@triton.jit
def _apply_first(
    x,
    w,
    first,
    n_left,
    n_obs: tl.constexpr,
    n_first: tl.constexpr,
    R: tl.constexpr,
    X: tl.constexpr,
    F: tl.constexpr,
    precision: tl.constexpr,
):
    """Multiply a tile of rows x by the weights w, of which `first` holds the first X rows."""
    total = _product(
        _load_columns(x, n_left, n_obs, n_obs, R, X), first, precision
    )
    for k in range(X, n_obs, X):
        columns = _load_columns(x + k, n_left, n_obs - k, n_obs, R, X)
        weights = _load(w + k * n_first, n_obs - k, n_first, X, F)
        total += _product(columns, weights, precision)
    return total


@triton.jit
def _store_layer(
    place,
    of_weight,
    of_bias,
    n_in,
    n_out,
    k,
    is_shared: tl.constexpr,
    I: tl.constexpr,
    O: tl.constexpr,
):
    """Store the gradient of a layer; return the address for the next layer's gradient.

    Args:
      k: the first row of the weights, if programs share them; else only the program whose k is 0 stores anything.
    """
    stack = tl.program_id(1) % 2
    n_stored = tl.where(k == 0, 1, 0)
    row = k if is_shared else (1 - n_stored) * n_in
    rows = place + (stack * n_in + row) * n_out
    _store(rows, of_weight, n_in - row, n_out, I, O)
    place += 2 * n_in * n_out
    _store(place + stack * n_out, of_bias[None, :], n_stored, n_out, 1, O)
    return place + 2 * n_out


@triton.jit
def _add_gradient(of_weight, of_bias, x, d, precision: tl.constexpr):
    """Add the gradient of a layer over rows x; d is the gradient of its output."""
    of_weight += _product(tl.trans(x), d, precision)
    return of_weight, of_bias + tl.sum(d, 0)


@triton.jit
def _zeros(I: tl.constexpr, O: tl.constexpr):
    return tl.zeros([I, O], tl.float32), tl.zeros([O], tl.float32)


@triton.jit
def _load_needed(is_needed, learner, row, n_rows, R: tl.constexpr):
    """Load whether rows from the given one on are needed, as integers."""
    i = row + tl.arange(0, R)
    return tl.load(is_needed + learner * n_rows + i, i < n_rows, 0).to(tl.int32)


@triton.jit
def _store_hidden(
    out,
    place,
    y,
    height,
    width,
    H: tl.constexpr,
    W: tl.constexpr,
    values_only: tl.constexpr,
):
    """Store the outputs of a hidden layer, which the critic's values alone do not have."""
    if not values_only:
        _store(out + place * width, y, height, width, H, W)


@triton.jit
def _store_values(
    out, y, needed, learner, row, n_rows, R: tl.constexpr, Y: tl.constexpr
):
    """Store the first column of y [R, Y] in the rows that are needed."""
    value = tl.sum(tl.where(tl.arange(0, Y)[None, :] == 0, y, 0.0), 1)
    i = row + tl.arange(0, R)
    tl.store(out + learner * n_rows + i, value, needed != 0)


@triton.jit
def forward_kernel(
    x,
    w1,
    b1,
    w2,
    b2,
    w3,
    b3,
    y1,
    y2,
    out,
    stride_x,  # from learner to learner
    stride_w1,
    stride_b1,
    stride_w2,
    stride_b2,
    stride_w3,
    stride_b3,
    n_rows,
    n_rows_of_program,
    n_obs: tl.constexpr,
    n_first: tl.constexpr,
    n_second: tl.constexpr,
    n_outputs: tl.constexpr,
    X: tl.constexpr,  # the same, padded; of an observation, at once
    F: tl.constexpr,
    S: tl.constexpr,
    Y: tl.constexpr,
    R: tl.constexpr,  # rows of a tile
    is_tanh: tl.constexpr,
    precision: tl.constexpr,
    values_only: tl.constexpr,
):
    """Compute y1, y2 and out[l, s, i], the layers of stack s of learner l, of row x[l, i].

    With `values_only`, y1[l, i] says which rows are needed, and out[l, i] is the critic's value of these. A program
    has one tile then, and computes nothing where none of its rows is needed.
    """
    stack = tl.program_id(1).to(tl.int64) * (1 + values_only) + values_only
    first = _load_layer(w1, stack, stride_w1, n_obs, n_first, X, F)
    bias1 = _load_layer(b1, stack, stride_b1, 1, n_first, 1, F)
    second = _load_layer(w2, stack, stride_w2, n_first, n_second, F, S)
    bias2 = _load_layer(b2, stack, stride_b2, 1, n_second, 1, S)
    head = _load_layer(w3, stack, stride_w3, n_second, n_outputs, S, Y)
    bias3 = _load_layer(b3, stack, stride_b3, 1, n_outputs, 1, Y)
    weights = _layer(w1, stack, stride_w1, n_obs, n_first)

    x += stack // 2 * stride_x
    start = tl.program_id(0) * n_rows_of_program
    end = min(start + n_rows_of_program, n_rows)
    if values_only:
        needed = _load_needed(y1, stack // 2, start, n_rows, R)
        # No tile or one: with all of the loop within an if, products of bfloat16 were wrong by Triton 3.6.
        end = start + (end - start) * tl.max(needed, 0)
    for row in range(start, end, R):
        n_left, place = end - row, stack * n_rows + row
        y = _apply_first(
            x + row * n_obs,
            weights,
            first,
            n_left,
            n_obs,
            n_first,
            R,
            X,
            F,
            precision,
        )
        y = _activate(y + bias1, is_tanh)
        _store_hidden(y1, place, y, n_left, n_first, R, F, values_only)
        y = _activate(_product(y, second, precision) + bias2, is_tanh)
        _store_hidden(y2, place, y, n_left, n_second, R, S, values_only)
        y = _product(y, head, precision) + bias3
        if values_only:
            _store_values(out, y, needed, stack // 2, row, n_rows, R, Y)  # pyright: ignore[reportPossiblyUnboundVariable]
        else:
            _store(out + place * n_outputs, y, n_left, n_outputs, R, Y)


@triton.jit
def backward_kernel(
    g,
    x,
    y1,
    y2,
    w2,
    w3,
    out,
    stride_x,
    stride_w2,
    stride_w3,
    n_rows,
    n_rows_of_program,
    n_params,
    n_obs: tl.constexpr,
    n_first: tl.constexpr,
    n_second: tl.constexpr,
    n_outputs: tl.constexpr,
    X: tl.constexpr,
    F: tl.constexpr,
    S: tl.constexpr,
    Y: tl.constexpr,
    R: tl.constexpr,
    is_tanh: tl.constexpr,
    precision: tl.constexpr,
):
    """Compute out[l, p], the gradient of learner l's parameters over program p's rows; g is that of the outputs.

    Parameters are laid out one after the other, of each the actor's before the critic's. A program has X rows of the
    first layer's weights; that with the first ones has all other parameters, too.
    """
    k = tl.program_id(2) * X
    stack = tl.program_id(1).to(tl.int64)
    second = _load_layer(w2, stack, stride_w2, n_first, n_second, F, S)
    head = _load_layer(w3, stack, stride_w3, n_second, n_outputs, S, Y)
    of_first, of_bias1 = _zeros(X, F)
    of_second, of_bias2 = _zeros(F, S)
    of_head, of_bias3 = _zeros(S, Y)

    base = stack * n_rows
    start = tl.program_id(0) * n_rows_of_program
    end = min(start + n_rows_of_program, n_rows)
    for row in range(start, end, R):
        n_left, place = end - row, base + row
        d = _load(g + place * n_outputs, n_left, n_outputs, R, Y)
        y = _load(y2 + place * n_second, n_left, n_second, R, S)
        of_head, of_bias3 = _add_gradient(of_head, of_bias3, y, d, precision)
        d = _product(d, tl.trans(head), precision) * _slope(y, is_tanh)
        y = _load(y1 + place * n_first, n_left, n_first, R, F)
        of_second, of_bias2 = _add_gradient(
            of_second, of_bias2, y, d, precision
        )
        d = _product(d, tl.trans(second), precision) * _slope(y, is_tanh)
        y = _load_columns(
            x + stack // 2 * stride_x + row * n_obs + k,
            n_left,
            n_obs - k,
            n_obs,
            R,
            X,
        )
        of_first, of_bias1 = _add_gradient(of_first, of_bias1, y, d, precision)

    out += (stack // 2 * tl.num_programs(0) + tl.program_id(0)) * n_params
    out = _store_layer(out, of_first, of_bias1, n_obs, n_first, k, True, X, F)
    out = _store_layer(
        out, of_second, of_bias2, n_first, n_second, k, False, F, S
    )
    _store_layer(out, of_head, of_bias3, n_second, n_outputs, k, False, S, Y)


# ---- Recurrent cells, for `nets.cells`.


def shared_memory(device: torch.device) -> int:
    """Return the bytes that the threads of a program may share on a GPU."""
    return torch.cuda.get_device_properties(
        device
    ).shared_memory_per_block_optin


@triton.jit
def _sigmoid(x):
    return libdevice.fast_dividef(1.0, 1.0 + libdevice.fast_expf(-x))


@triton.jit
def _load_gates(place, is_there, stride, is_lstm: tl.constexpr):
    """Load a tile of each gate; their tiles are `stride` apart, and only an LSTM has a fourth."""
    first = tl.load(place, is_there, 0.0)
    second = tl.load(place + stride, is_there, 0.0)
    third = tl.load(place + 2 * stride, is_there, 0.0)
    fourth = third
    if is_lstm:
        fourth = tl.load(place + 3 * stride, is_there, 0.0)
    return first, second, third, fourth


@triton.jit
def _load_memory(place, is_there, size, is_lstm: tl.constexpr):
    """Load h, and c of an LSTM, `size` apart."""
    h = tl.load(place, is_there, 0.0)
    c = h
    if is_lstm:
        c = tl.load(place + size, is_there, 0.0)
    return h, c


@triton.jit
def _store_memory(place, h, c, is_there, size, is_lstm: tl.constexpr):
    tl.store(place, h, is_there)
    if is_lstm:
        tl.store(place + size, c, is_there)


@triton.jit
def _step(x0, x1, x2, x3, p0, p1, p2, p3, h, c, is_lstm: tl.constexpr):
    """Compute a cell's memory after a step; x and p are what the gates get from inputs and from the memory."""
    if is_lstm:
        c = _sigmoid(x1 + p1) * c
        c += _sigmoid(x0 + p0) * _activate(x2 + p2, True)
        h = _sigmoid(x3 + p3) * _activate(c, True)
    else:
        z = _sigmoid(x1 + p1)
        n = _activate(x2 + _sigmoid(x0 + p0) * p2, True)
        h = (1.0 - z) * n + z * h
    return h, c


@triton.jit
def _gates_of(
    h, w0, w1, w2, w3, precision: tl.constexpr, is_lstm: tl.constexpr
):
    """Multiply a tile by the weights of each gate."""
    p0 = _product(h, w0, precision)
    p1 = _product(h, w1, precision)
    p2 = _product(h, w2, precision)
    p3 = p2
    if is_lstm:
        p3 = _product(h, w3, precision)
    return p0, p1, p2, p3


@triton.jit
def _places(
    n_rows,
    n_units: tl.constexpr,
    n_gates: tl.constexpr,
    U: tl.constexpr,
    R: tl.constexpr,
):
    """Return the rows of a program, their places in a memory and in the gates of a step, and which are there."""
    row = tl.program_id(0) * R + tl.arange(0, R)
    unit = tl.arange(0, U)[None, :]
    place = row[:, None] * n_units + unit
    of_gates = row[:, None] * (n_gates * n_units) + unit
    return row, place, of_gates, (row < n_rows)[:, None] & (unit < n_units)


@triton.jit
def _load_weights(
    weight,
    stride,
    gate_stride,
    n_units: tl.constexpr,
    is_lstm: tl.constexpr,
    U: tl.constexpr,
):
    """Load the weights of each gate [U, U]; their rows are `stride` apart, and the gates `gate_stride`."""
    i, j = tl.arange(0, U)[:, None], tl.arange(0, U)[None, :]
    is_there = (i < n_units) & (j < n_units)
    return _load_gates(weight + i * stride + j, is_there, gate_stride, is_lstm)


@triton.jit
def _kept(x, done, row, n_rows):
    """Return 0 in place of x in rows whose episode ends with the step that `done` is of."""
    is_last = tl.load(done + row, row < n_rows, 0)
    return tl.where(is_last[:, None] != 0, 0.0, x)


@triton.jit
def memories_kernel(
    x,
    done,
    weight,
    bias,
    memory,
    out,
    n_steps,
    n_rows,
    n_units: tl.constexpr,
    U: tl.constexpr,  # the same, padded
    R: tl.constexpr,  # rows of a program
    is_lstm: tl.constexpr,
    precision: tl.constexpr,
):
    """Compute out[:, t], the memory of a cell before each step t: see `nets.cells.memories`.

    What a step reads is loaded in the step before, while products are computed.
    """
    n_gates: tl.constexpr = 4 if is_lstm else 3
    row, place, of_gates, is_there = _places(n_rows, n_units, n_gates, U, R)
    size = n_rows * n_units
    w0, w1, w2, w3 = _load_weights(
        weight, n_gates * n_units, n_units, n_units, is_lstm, U
    )
    unit = tl.arange(0, U)[None, :]
    b0, b1, b2, b3 = _load_gates(bias + unit, unit < n_units, n_units, is_lstm)

    h, c = _load_memory(memory + place, is_there, size, is_lstm)
    x0, x1, x2, x3 = _load_gates(x + of_gates, is_there, n_units, is_lstm)
    for t in range(n_steps):
        before = out + t * size + place
        _store_memory(before, h, c, is_there, n_steps * size, is_lstm)
        n0, n1, n2, n3 = _load_gates(
            x + (t + 1) * (size * n_gates) + of_gates,
            is_there & (t + 1 < n_steps),
            n_units,
            is_lstm,
        )
        p0, p1, p2, p3 = _gates_of(h, w0, w1, w2, w3, precision, is_lstm)
        h, c = _step(
            x0, x1, x2, x3, p0 + b0, p1 + b1, p2 + b2, p3 + b3, h, c, is_lstm
        )
        h = _kept(h, done + t * n_rows, row, n_rows)
        c = _kept(c, done + t * n_rows, row, n_rows)
        x0, x1, x2, x3 = n0, n1, n2, n3


@triton.jit
def _load_factors(
    of_gates,
    through,
    grads,
    t,
    place,
    of_place,
    is_there,
    size,
    total,
    n_gates: tl.constexpr,
    n_units: tl.constexpr,
    is_lstm: tl.constexpr,
):
    """Load what `adjoints_kernel` reads of a step; nothing before the first one."""
    is_there = is_there & (t >= 0)
    f0, f1, f2, f3 = _load_gates(
        of_gates + t * (size * n_gates) + of_place, is_there, n_units, is_lstm
    )
    here = t * size + place
    s0, s1 = _load_memory(through + here, is_there, total, is_lstm)
    gh, gc = _load_memory(grads + here, is_there, total, is_lstm)
    return f0, f1, f2, f3, s0, s1, gh, gc


@triton.jit
def adjoints_kernel(
    of_gates,
    through,
    weight,  # transposed
    grads,
    out,
    n_steps,
    n_rows,
    n_units: tl.constexpr,
    U: tl.constexpr,
    R: tl.constexpr,
    is_lstm: tl.constexpr,
    precision: tl.constexpr,
):
    """Compute out[:, t], the gradient of a loss in the memory after each step t: see `nets.cells.adjoints`.

    What a step reads is loaded in the step after it, while products are computed.
    """
    n_gates: tl.constexpr = 4 if is_lstm else 3
    _, place, of_place, is_there = _places(n_rows, n_units, n_gates, U, R)
    size = n_rows * n_units
    total = n_steps * size
    w0, w1, w2, w3 = _load_weights(
        weight, n_units, n_units * n_units, n_units, is_lstm, U
    )
    dh = tl.zeros([R, U], tl.float32)
    dc = dh
    f0, f1, f2, f3, s0, s1, gh, gc = _load_factors(
        of_gates,
        through,
        grads,
        n_steps - 1,
        place,
        of_place,
        is_there,
        size,
        total,
        n_gates,
        n_units,
        is_lstm,
    )
    for step in range(n_steps):
        t = n_steps - 1 - step
        _store_memory(out + t * size + place, dh, dc, is_there, total, is_lstm)
        n0, n1, n2, n3, m0, m1, nh, nc = _load_factors(
            of_gates,
            through,
            grads,
            t - 1,
            place,
            of_place,
            is_there,
            size,
            total,
            n_gates,
            n_units,
            is_lstm,
        )
        past = dh * s0
        if is_lstm:
            dc += past
            d0, d1, d2 = dc * f0, dc * f1, dc * f2
            past = _product(dh * f3, w3, precision)
            dc = gc + dc * s1
        else:
            d0, d1, d2 = dh * f0, dh * f1, dh * f2
        dh = gh + past + _product(d0, w0, precision)
        dh += _product(d1, w1, precision) + _product(d2, w2, precision)
        f0, f1, f2, f3, s0, s1, gh, gc = n0, n1, n2, n3, m0, m1, nh, nc
