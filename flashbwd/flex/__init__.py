"""FlexAttention training: gradients for any score_mod, mask_mod and BlockMask.

attention       the public functions
forward         PyTorch's forward, or the reference's
gradients       the gradients, computed by a kernel or the reference
backends        chooses the kernel of a call, and calls it
graph_operator  the backward of a compiled graph
arguments       checks of arguments, shared with flex decoding
modifications   checks of score_mod and mask_mod, and the tensors that they capture
lists           the query blocks that each key block visits, in the tiles of the kernels
mask_bits       mask_mod evaluated for tiles, one bit per pair
hidden_scores   a mask as part of the score_mod, if its bits would take too much memory
kernel_lists    lists and bits in the order of the kernels
diagonal        whether a mask shows pairs above the diagonal
score_change    recognises a softcap, ALiBi and a captured bias, which the kernels of the build compute
captured_bias   a captured tensor as attn_bias, and its gradient
generated       every other score_mod, compiled at run time
tile            the tile of a kernel
cache           what is computed once per BlockMask
storages        what is computed once per set of tensors, for compiled graphs
counts          counts the backwards that kernels computed in compiled models
"""
