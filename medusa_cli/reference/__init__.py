"""Reference decoder: speculative decoding with draft trees in plain Python, to read in an evening and to test against.

The model is any callable from the tokens so far to the probabilities of the next one; a token is anything hashable.
A file for each part: draft trie, candidate generator, parallel verifier, acceptance, output loop. The standard library
is enough, and Python 3.9. docs/reference.md is the way in.
"""

from medusa_cli.reference.acceptance import Greedy as Greedy
from medusa_cli.reference.acceptance import Sampling as Sampling
from medusa_cli.reference.candidates import DraftModel as DraftModel
from medusa_cli.reference.loop import DecodeError as DecodeError
from medusa_cli.reference.loop import Step as Step
from medusa_cli.reference.loop import Text as Text
from medusa_cli.reference.loop import decode as decode
from medusa_cli.reference.trie import Trie as Trie
from medusa_cli.reference.verifier import Verifier as Verifier
