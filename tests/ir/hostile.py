"""What the tests of hostile text share: a kernel to break, and instructions of the tests' own."""

import pytest
from tests.ir.build_random import declared

OPS = ["xt_all", "xt_make", "xt_none", "xt_two"]
HEAD = "opennki_ir = 1\nkernel('k', target='trn1')\nt0 = param.shared_hbm(float32, (128, 512), name='a')\n"


@pytest.fixture(autouse=True, scope="module")
def _declared():
    with declared():
        yield
