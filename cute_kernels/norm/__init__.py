"""Root mean square and layer norms: ``ck.rms_norm``, ``ck.layer_norm`` (docs/norm.md)."""
