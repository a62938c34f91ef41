//! What can go wrong between ranks.

/// What can go wrong between ranks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CollectiveError {
    /// A library is missing, or cannot be used.
    #[error("{library} cannot be used: {reason}")]
    Library {
        /// Which one.
        library: String,
        /// What was looked for, and why it will not do.
        reason: String,
    },
    /// A rank is dead or hangs.
    #[error("rank {rank} of {size} is lost: {reason}")]
    Lost {
        /// Which one.
        rank: usize,
        /// Of how many.
        size: usize,
        /// How it was noticed.
        reason: String,
    },
    /// Ranks do not run the same thing.
    #[error("the ranks differ in {what}: {theirs} on rank {rank}, {ours} on rank 0")]
    Differs {
        /// In what.
        what: String,
        /// The first rank that differs from rank 0.
        rank: usize,
        /// What it has.
        theirs: String,
        /// What rank 0 has.
        ours: String,
    },
    /// An exchange failed.
    #[error("{what} failed: {reason}")]
    Failed {
        /// What was being done.
        what: String,
        /// What the library said.
        reason: String,
    },
}
