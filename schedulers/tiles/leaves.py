"""Leaves of K: the order ``tree`` cuts a sum into at most eight, by its length alone.

    length(K) = 16 ceil(K / 128)        leaf l = K[l length : (l + 1) length]

Whole groups of 16, so that a leaf is a chain; eighths of K wherever K is a multiple of 128, so that
1, 2, 4 or 8 tensor-parallel ranks cut K at the edge of a leaf.  The functions take ints of Python
and of CuTe alike.
"""

#: Leaves of a long sum, and the most that any has.
LEAVES = 8
_GROUP = 16


def length(k):
    """Elements of K in a leaf; the last one may be shorter."""
    return (k + LEAVES * _GROUP - 1) // (LEAVES * _GROUP) * _GROUP


def count(k):
    """Leaves that have elements, for K of 1 or more."""
    return (k + length(k) - 1) // length(k)


def size(leaf, k, minimum=min, maximum=max):
    """Elements of leaf number ``leaf``; 0 behind the last one."""
    return maximum(minimum(length(k), k - leaf * length(k)), 0)
