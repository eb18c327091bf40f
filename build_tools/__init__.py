"""The build: how sources become `flashbwd/_C.so`, `flashbwd/_C_cuda.so` and `flashbwd/_C_python.so`."""
