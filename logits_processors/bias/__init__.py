"""BIAS stages: logits shifted or scaled by token id or history."""
