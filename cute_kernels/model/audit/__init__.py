"""``ck.audit``: which module of a model lets the bits of a token follow its surroundings.

A token has one row in every tensor that a module takes or gives.  The model runs with each sequence
alone, then among other surroundings, and every module's rows are compared by their bytes:

    checks -> probe (which dimension is the token's?) -> cases (the surroundings)
           -> trace (digests of rows) -> compare (who began it?) -> details (its bits) -> report
"""
