"""The recovery study: failures under `lastgood run`, with blocking and overlapped saves, as ECRL's study has them."""
