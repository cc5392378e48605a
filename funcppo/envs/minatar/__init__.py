"""Games of MinAtar: miniatures of Atari games on a grid of 10 x 10 cells, with the rules of the package `minatar`.

Source: Young & Tian 2019, "MinAtar: an Atari-inspired testbed for thorough and reproducible reinforcement learning
experiments", arXiv:1903.03176.
"""
