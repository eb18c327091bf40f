"""The build: how sources become `flashbwd/_C.so` and `flashbwd/_C_cuda.so`."""
