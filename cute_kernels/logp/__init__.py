"""Log-probabilities of chosen tokens from hidden states and the LM head, without the logits."""
