//! Undoing a step of a plain fp32 parameter with fp32 moments, where it can be undone.
