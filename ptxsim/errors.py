"""The exception of ptxsim."""


class PtxsimError(RuntimeError):
    """A launch that the simulator refused or stopped; the text says where and why."""
