"""The benchmark harness: cases as data, peers as plug-ins, one process, one report.

``python -m flashbwd bench`` runs it. The modules, in the order data flows through them:

========== ==============================================================================
cases      what is measured: shapes, features, the bars each must reach
oracle     float64 gradients of the naive formula, on slices
errors     of each peer's gradients, against it: the largest over blocks of rows
peers      who is measured on attention (PyTorch's kernels, flex_attention, this library)
norm_peers likewise, on LayerNorm and RMSNorm; decoding_peers, on short-query decoding
measure    how: interleaved rounds, CUDA events or graphs, memory, ceilings
machine    where: GPU or CPU, driver, versions, commit, hash of the kernel sources
results    what came out: records, JSON, bars, comparison with an earlier file
report     Markdown tables and plots
acceptance the record of GPU tests and compute-sanitizer that a release needs
runner     the loop over cases, with a time budget and resumption
========== ==============================================================================

Nothing here is imported by ``import flashbwd``.
"""
