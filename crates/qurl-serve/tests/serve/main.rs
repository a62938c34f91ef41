//! The server in this process, asked over real connections: what the command's tests (`qurl`'s `serve`) would
//! need a whole binary for.

mod answers;
mod common;
mod dialects;
mod orders;
mod tools;
mod trainers;
