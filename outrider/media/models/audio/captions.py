"""The captions that the audio models understand."""

from outrider.media.models.language import Language

TIMBRES = ("pure", "hollow", "bright")  # harmonics: none, the odd ones, all
PATTERNS = ("pulse", "trill", "arpeggio", "scale", "rise", "fall")  # rise and fall are chirps
HEIGHTS = ("low", "high")
NOTES = ("do", "re", "mi", "fa", "sol", "la", "ti")
TEMPOS = ("slow", "fast")
LANGUAGE = Language(
    slots=(TIMBRES, PATTERNS, HEIGHTS, NOTES, TEMPOS),
    template="a {} {} on a {} {} at a {} tempo",
    fillers=frozenset(("a", "an", "on", "at", "tempo")),
    form="a TIMBRE PATTERN on a HEIGHT NOTE at a SPEED tempo",
)
