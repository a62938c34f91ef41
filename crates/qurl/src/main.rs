//! The `qurl` command line.
fn main() {}
