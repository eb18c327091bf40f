"""Compiles Python modifications of attention scores (score_mod and mask_mod) to CUDA kernels.

captures   a key that is equal for functions that compute the same, and the tensors that a function captures
code       the names and attributes that a function's code looks up
attributes reads attributes of objects without running code of their classes
handle     compile_mods: functions that may read any object and take their tensors as named arguments
trace      traces a function to a graph of operators on scalars
built_in   recognises built-in modifications (causal, window, softcap, ALiBi), which need no compilation
rules      the rules by which built_in evaluates operators
values     the symbolic values with which built_in evaluates a graph
operators  the C++ expression of each operator
element    the C++ expressions that address an element of a captured tensor
emitter    writes any other graph as the body of a CUDA C++ function
emit       writes such functions as the struct that the decoding kernel takes
row        subexpressions that a kernel computes once per query row
number_slots  numbers that a kernel gets as arguments
derivative writes the derivative of a score_mod, for the backward kernels
reads      checks that a backward reads what its forward read
nvrtc      compiles with the NVRTC that ships with PyTorch, caches on disk, loads kernels
kernels    finds or makes the kernel for the two modifications of a call
run        launches the forward kernel
backward   finds or makes the backward kernel, and launches it
in_graph   flex decoding inside torch.compile
"""
