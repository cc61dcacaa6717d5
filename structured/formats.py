"""String formats that decodekit enforces, each as a regular expression of the whole text.

Where RFCs leave a choice the narrower form is taken: every text that matches is valid by any
checker. A date knows the length of its month, leap years too.
"""

from __future__ import annotations

import re
from functools import lru_cache

_D = "[0-9]"
_LEAP = (
    f"(?:{_D}{{2}}(?:0[48]|[2468][048]|[13579][26])"
    "|(?:0[48]|[2468][048]|[13579][26])00)"  # year 0000 is none of Python's
)
_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_YEAR = f"(?:[1-9]{_D}{{3}}|0[1-9]{_D}{{2}}|00[1-9]{_D}|000[1-9])"
DATE = f"(?:{_YEAR}-{_DAY}|{_LEAP}-02-29)"
_CLOCK = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?"
_ZONE = r"(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"(?:{_OCTET}\.){{3}}{_OCTET}"
_H = "[0-9a-fA-F]{1,4}"
_IPV6 = "|".join(
    [
        f"(?:{_H}:){{7}}{_H}",
        *(f"(?:{_H}:){{{left}}}(?::{_H}){{1,{7 - left}}}" for left in range(1, 7)),
        f":(?::{_H}){{1,7}}",
        f"(?:{_H}:){{1,7}}:",
        "::",
    ]
)
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
# At most 253 characters without a count over the whole: few long labels, or more short ones.
_SHORT = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,22}[A-Za-z0-9])?"
_HOST = rf"(?:{_LABEL}(?:\.{_LABEL}){{0,2}}|{_SHORT}(?:\.{_SHORT}){{3,9}})"
_DOMAIN = rf"(?:{_LABEL}(?:\.{_LABEL}){{1,2}}|{_SHORT}(?:\.{_SHORT}){{3,9}})"
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]"  # at most 64 of them before the @
_LOCAL = (
    rf"(?:{_ATOM}{{1,64}}|{_ATOM}{{1,31}}\.{_ATOM}{{1,32}}"
    rf"|{_ATOM}{{1,12}}(?:\.{_ATOM}{{1,12}}){{2,4}})"
)
_EMAIL = f"{_LOCAL}@{_DOMAIN}"
_PCHAR = "(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
_TAIL = rf"(?:\?(?:{_PCHAR}|[/?])*)?(?:#(?:{_PCHAR}|[/?])*)?"
_SCHEME = "[A-Za-z][A-Za-z0-9+.-]*"
_AUTHORITY = (
    "//(?:(?:[A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})+@)?"
    rf"{_LABEL}(?:\.{_LABEL})*(?::[0-9]{{1,4}})?"
)
_URI = (
    rf"{_SCHEME}:(?:{_AUTHORITY}(?:/{_PCHAR}*)*|/(?:{_PCHAR}+(?:/{_PCHAR}*)*)?"
    rf"|{_PCHAR}+(?:/{_PCHAR}*)*){_TAIL}"
)
_REFERENCE = (
    rf"(?:{_URI}|(?:{_AUTHORITY}(?:/{_PCHAR}*)*|/(?:{_PCHAR}+(?:/{_PCHAR}*)*)?"
    rf"|(?:[A-Za-z0-9._~!$&'()*+,;=@-]|%[0-9A-Fa-f]{{2}})+(?:/{_PCHAR}*)*)?{_TAIL})"
)
_TIME = "(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_DATES = "(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"

FORMATS: dict[str, str] = {
    "date": DATE,
    "time": _CLOCK + _ZONE,
    "date-time": f"{DATE}T{_CLOCK}{_ZONE}",
    "duration": f"P(?:{_DATES}(?:T{_TIME})?|T{_TIME}|[0-9]+W)",
    "uuid": "[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}",
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "hostname": _HOST,
    "email": _EMAIL,
    "uri": _URI,
    "uri-reference": _REFERENCE,
    "json-pointer": r"(?:/(?:[^/~\x00-\x1f]|~[01])*)*",
    "relative-json-pointer": r"(?:0|[1-9][0-9]*)(?:#|(?:/(?:[^/~\x00-\x1f]|~[01])*)*)",
}


@lru_cache(maxsize=32)
def compiled(name: object) -> re.Pattern[str] | None:
    """The pattern of a known format, or None."""
    pattern = FORMATS.get(name) if isinstance(name, str) else None
    return None if pattern is None else re.compile(pattern)
