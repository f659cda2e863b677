"""The layers of a decoder, each holding one rank's share of its weights."""
