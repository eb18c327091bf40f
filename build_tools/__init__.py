"""Builds `flashbwd/_C.so` and `flashbwd/_C_cuda.so`."""
