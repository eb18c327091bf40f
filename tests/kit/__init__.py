"""What the tests share: cases, inputs, the float64 oracle and the tolerance rule. Nothing here uses flashbwd."""
