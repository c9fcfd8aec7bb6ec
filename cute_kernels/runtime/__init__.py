"""Host side of a call: plan cache, op definition, dispatch, operands, checks, main_grad."""
