"""Extensions of Inductor: a graph pass on matrix products, Triton kernels, and the lowering of the random bits."""
