"""The colours of the page and its charts, for light and dark backgrounds. Printing uses the light ones."""

LIGHT = {
    "page": "#fafaf8",
    "card": "#ffffff",
    "ink": "#1d2227",
    "soft": "#59626b",
    "rule": "#e2e4e0",
    "on": "#0072b2",
    "off": "#b87000",
    "naive": "#008a64",
    "torch": "#b8578a",
}
DARK = {
    "page": "#14171a",
    "card": "#1b1f23",
    "ink": "#e7e9eb",
    "soft": "#a4adb5",
    "rule": "#2f353b",
    "on": "#56b4e9",
    "off": "#e6a532",
    "naive": "#2fbf94",
    "torch": "#de8fbc",
}
WHERE_DARK = "@media screen and (prefers-color-scheme: dark)"
