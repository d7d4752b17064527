//! Splits a step into chunks.
