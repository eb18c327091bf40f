"""FlexAttention training: gradients for any score_mod, mask_mod and BlockMask.

attention      the public functions
gradients      the computation of the gradients
arguments      checks of arguments, shared with flex decoding
modifications  checks of score_mod and mask_mod, and the tensors that they capture
lists          the query blocks that each key block visits, in the tiles of the kernels
mask_bits      mask_mod evaluated for tiles, one bit per pair
diagonal       whether a mask shows pairs above the diagonal
score_change   recognises a softcap and ALiBi, which the kernels compute
tile           the tile of a kernel
cache          what is computed once per BlockMask
"""
