//! The HTTP stack: `hyper` reads and writes HTTP/1.1, `axum` finds the route, and what is here limits a
//! caller.
//!
//! Nobody who connects can take more than his share: a connection has so long for its headers and so much
//! memory for them ([`Limits`]), a reader who does not read is left after a while ([`patient`]), there are so
//! many connections at a time and no more, and bodies are read up to a limit, within a time, and out of one
//! budget for all ([`body`]). On a loopback address only requests that name it by a loopback name are
//! answered ([`guard`]), so that a page from elsewhere cannot reach it by pointing its own name here. TLS is
//! left to a proxy.

pub mod body;
pub mod guard;
mod listen;
mod patient;

pub use body::{BodyBudget, BodyError, pieces};
pub use listen::{Limits, Listener, runtime};
