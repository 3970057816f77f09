//! Tests of the replay.

mod damage;
