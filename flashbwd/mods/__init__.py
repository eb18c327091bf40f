"""Python modifications of attention scores as CUDA: what they are made of, their source, and its compilation.

captures   what a function is made of: a key that says when two are the same, and the tensors it captures
emit       a traced function as CUDA C++
nvrtc      compilation with the NVRTC that ships with PyTorch, a cache on disk, loading
derivative the derivative of a score_mod, for the backward kernel
kernels    from the two modifications of a call to a kernel that is ready to launch
run        launching it
backward   its gradients: from the modifications to a launch
"""
