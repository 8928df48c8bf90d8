"""The layers of the package."""

LAYERS = [
    ("errors", "warning"),
    ("util",),
    ("remote",),
    ("usercode",),
    ("config", "core"),
    ("data", "gradients", "system"),
    ("client", "models", "selection", "uploads", "robust", "privacy", "loggers"),
    ("algorithms",),
    ("tracking",),
    ("experiment", "results"),
    ("engine",),
    ("stepping",),
    ("api",),
    ("simulation",),
    ("testing", "tuning", "evaluating"),
    ("pages",),
    ("cli",),
    ("run",),
]
"""From the bottom to the top: an import may only point down, or stay within a module or folder of its own."""
