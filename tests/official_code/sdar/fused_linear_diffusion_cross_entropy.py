"""Where SDAR's repository has its fused loss, which its model imports; written for the tests."""


def fused_loss(*_):
    raise NotImplementedError
