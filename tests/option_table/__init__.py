"""Every public op with every option at another value than its default, beside float64 oracles.

`TABLE` has the cases of an op by a label each.  A case runs the public function, forward and
backward, and returns the largest error of each result in parts of its bound.  It runs on whichever
backend is in place (`backends`), and `calls` records the arguments that the op was called with.
"""

from tests.option_table import attention, linear_attn, mhc, moe, policy, rows
from tests.option_table.calls import Cases

TABLE: dict[str, Cases] = {
    **rows.TABLE,
    **policy.TABLE,
    **mhc.TABLE,
    **attention.TABLE,
    **moe.TABLE,
    **linear_attn.TABLE,
}
