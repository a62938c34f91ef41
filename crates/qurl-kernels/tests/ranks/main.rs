//! Exchanges between ranks: the same checks of content over every transport.

mod every;
mod threads;
