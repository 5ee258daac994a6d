"""Which proposals stand. Pure functions, to be read beside the papers.

Greedy verification: with proposals d_1 .. d_n and the target's own choices t_0 .. t_n (t_i is what the target
says after position i of the block), the longest prefix with d_(i+1) = t_i stands, and the choice after it comes
free. The emitted tokens are therefore t_0 .. t_k: always the target's, whatever the draft said.
"""

from __future__ import annotations

from collections.abc import Sequence


def accepted_prefix(proposals: Sequence[int], choices: Sequence[int]) -> int:
    """The number of leading proposals equal to the target's choices (`choices` is one longer)."""
    for index, proposal in enumerate(proposals):
        if proposal != choices[index]:
            return index
    return len(proposals)
