"""MARK stages: watermarks, which reweight what the truncations left."""
