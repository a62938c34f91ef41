//! Tests of the public API: goldens, identities of the paper, derivatives, extremes, the command's lines.

mod common;
mod derivatives;
mod extremes;
mod goldens;
mod identities;
mod uaq;
