//! Captures: check, write, replay.
