"""The benchmark harness: cases are data, peers are plug-ins, one process measures a suite and writes one report.

``python -m flashbwd bench`` runs it. These are the modules, in the order in which data flows through them:

=============== ===========================================================================
cases           the cases: shapes, features, and the bars that each case must reach
peers           the interface of a peer
attention_peers attention peers: PyTorch's kernels, flex_attention, this library
norm_peers      LayerNorm and RMSNorm peers
decoding_peers  short-query decoding peers
block_peers     training steps of whole transformer blocks
contenders      which peers run a case, and their common inputs
ahead           compiles slow peers in parallel processes before the measurement
oracle          float64 gradients of the naive formula, on slices
errors          error of each peer's gradients against the oracle
measure         timing: interleaved rounds, CUDA events or graphs; memory, ceilings
energy          the energy counter of a GPU
machine         GPU or CPU, driver, versions, commit, hash of the kernel sources
results         records, JSON files, bars, comparison with an earlier file
report          Markdown tables and plots
acceptance      the record of GPU tests and compute-sanitizer that a release needs
runner          the loop over cases, with a time budget and resumption
host_time       host time of flex_decoding calls and of small backwards
backward_time   the rows of host_time for small backwards
override_time   host time that the overrides of PyTorch's operators add
=============== ===========================================================================

``import flashbwd`` imports none of these modules.
"""
