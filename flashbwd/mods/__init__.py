"""Python modifications of attention scores as CUDA: what they are made of, their source, and its compilation.

captures   when two functions do the same: a key of what they are made of, and the tensors they capture
handle     compile_mods: functions that read objects, whose tensors are named arguments
trace      a function as a graph of operators on scalars
ordinary   what every build has kernels for (causal, window, softcap, ALiBi), recognised by what it computes
emit       any other, as CUDA C++
nvrtc      compilation with the NVRTC that ships with PyTorch, a cache on disk, loading
derivative the derivative of a score_mod, for the backward kernel
kernels    from the two modifications of a call to a kernel that is ready to launch
run        launching it
backward   its gradients: from the modifications to a launch
"""
