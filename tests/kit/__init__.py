"""Code that the tests share: cases, inputs, the float64 oracle and the tolerance rule.

The oracle, the inputs and the tolerance rule do not use flashbwd.
"""
