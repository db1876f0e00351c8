"""Find the loads and stores of spilled registers in a kernel's machine code."""

import re


def spills_in_loops(sass: str) -> list[str]:
    """Return the loads and stores of spilled registers in the innermost loops of a kernel's machine code."""
    lines = [(int(address, 16), text) for address, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]+);", sass)]
    branches = [(int(target, 16), address) for address, text in lines for target in re.findall(r"BRA.*?0x(\w+)", text)]
    loops = [(start, end) for start, end in branches if start < end]
    innermost = [a for a in loops if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    spills = [(address, text) for address, text in lines if re.search(r"\b(LDL|STL)\b", text)]
    return [text for address, text in spills if any(start <= address <= end for start, end in innermost)]
