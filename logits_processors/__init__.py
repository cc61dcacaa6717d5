"""The stages of the chain, one a file; the folder is the stage's kind."""
