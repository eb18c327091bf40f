"""FlexAttention training: gradients for any score_mod, mask_mod and BlockMask.

lists      the query blocks that each key block visits, in the tiles of the kernels
mask_bits  mask_mod evaluated for tiles, one bit per pair
"""
