//! The ranks of a run: the processes that train one model together.
//!
//! All ranks run the same program on the same recipe, problems and random numbers, and decide everything by
//! themselves; what is heavy is cut into parts (prompts that are sampled, sequences that are scored, shards
//! of updates, pieces of the optimizer's state) and what comes out is gathered, so that each of them has the
//! whole. Only rank 0 writes.
//!
//! An exchange is entered by all ranks or by none: what leads to one must be the same everywhere, or be
//! agreed upon first ([`Ranks::any`], [`Ranks::of_first`]).

use crate::recipe::{Recipe, RecipeError};
use crate::shards::{self, micro_batches};
use crate::wire::Wire;
use qurl_kernels::collective::{Collective, CollectiveError};
use qurl_kernels::types::SQUARES_BLOCK;
use qurl_model::compute::TapeOptions;
use std::ops::Range;
use std::sync::Arc;

/// The ranks of a run, as one of them sees them.
#[derive(Clone)]
pub struct Ranks {
    collective: Arc<Collective>,
    shards: usize,
    /// `trainer.zero_stage` is 3.
    divided: bool,
}

impl Ranks {
    /// A run of one rank, whose mini-batches are one shard.
    pub fn alone() -> Ranks {
        Ranks { collective: Arc::new(Collective::alone()), shards: 1, divided: false }
    }

    /// One rank that computes all shards, a power of two of them.
    pub fn sharded(shards: usize) -> Ranks {
        assert!(shards.is_power_of_two(), "{shards} shards");
        Ranks { shards, ..Ranks::alone() }
    }

    /// One rank that computes all shards of a recipe.
    pub fn one(recipe: &Recipe) -> Ranks {
        Ranks::sharded(recipe.trainer.shards)
    }

    /// The ranks of a run by a recipe; an error where they cannot share its shards.
    pub fn new(collective: Arc<Collective>, recipe: &Recipe) -> Result<Ranks, RecipeError> {
        let (shards, size) = (recipe.trainer.shards, collective.size());
        if !shards.is_multiple_of(size) {
            let key = "trainer.shards";
            let suggested = size.next_power_of_two().max(8);
            let expected = match size.is_power_of_two() {
                true => format!(
                    "a multiple of the {size} ranks of this run, since a rank computes whole shards; set \
                     {key} = {suggested}, say, and keep it: it is part of the rounding"
                ),
                false => format!(
                    "a multiple of the {size} ranks of this run, which a power of two never is: start 1, 2, \
                     4, 8, ... ranks"
                ),
            };
            let place = recipe.place(recipe.file(), key);
            return Err(RecipeError::Invalid {
                place,
                key: key.to_string(),
                found: shards.to_string(),
                expected,
            });
        }
        Ok(Ranks { collective, shards, divided: recipe.trainer.zero_stage == 3 })
    }

    /// Ranks that train nothing: they share evaluations.
    pub fn without_shards(collective: Arc<Collective>) -> Ranks {
        Ranks { shards: collective.size(), collective, divided: false }
    }

    /// The same rank with others that are only thought of: for plans.
    pub fn counted(&self) -> Ranks {
        let collective = Arc::new(Collective::counted(self.rank(), self.size()));
        Ranks { collective, ..self.clone() }
    }

    /// What moves the bytes.
    pub fn collective(&self) -> &Collective {
        &self.collective
    }

    /// This rank's number.
    pub fn rank(&self) -> usize {
        self.collective.rank()
    }

    /// How many there are.
    pub fn size(&self) -> usize {
        self.collective.size()
    }

    /// Whether this is the rank that writes: rank 0.
    pub fn is_first(&self) -> bool {
        self.rank() == 0
    }

    /// Whether packed weights and gradients are divided, too (ZeRO-3).
    pub fn divides_weights(&self) -> bool {
        self.divided && self.size() > 1
    }

    /// A rank's shards: neighbours, a subtree of the tree of sums; or every so many of them, so that the
    /// ranks compute neighbours at the same time ([`crate::gradients`]).
    fn shards_of(&self, rank: usize) -> impl Iterator<Item = usize> + use<> {
        let (each, size) = (self.shards_each(), self.size());
        let divided = self.divides_weights();
        (0..each).map(move |i| if divided { i * size + rank } else { rank * each + i })
    }

    /// Shards of each rank.
    pub fn shards_each(&self) -> usize {
        self.shards / self.size()
    }

    /// This rank's shards of sequences of these lengths, which a rank computes in passes of at most so many
    /// (see [`micro_batches`]).
    pub fn own_shards_of(&self, lengths: &[usize], tape: TapeOptions) -> Vec<Shard> {
        let shards = shards::cut(lengths, self.shards);
        let micros = |shard: &Range<usize>| -> Vec<Range<usize>> {
            let micros = micro_batches(&lengths[shard.clone()], tape).into_iter();
            micros.map(|micro| shard.start + micro.start..shard.start + micro.end).collect()
        };
        let passes = |shard: usize| {
            let beside = if self.divides_weights() { self.size() } else { 1 };
            let round = shard / beside * beside;
            shards[round..round + beside].iter().map(|shard| micros(shard).len()).max().unwrap_or(0)
        };
        let own = self.shards_of(self.rank());
        own.map(|shard| Shard { micros: micros(&shards[shard]), passes: passes(shard) }).collect()
    }

    /// Everyone's values of their shards ([`Ranks::own_shards_of`]), in the order of the shards.
    pub fn join_shards<T: Wire>(&self, own: Vec<Vec<T>>) -> Result<Vec<T>, CollectiveError> {
        let mut shards: Vec<(usize, Vec<T>)> = Vec::with_capacity(self.shards);
        for (rank, of_rank) in self.gather(own)?.into_iter().enumerate() {
            shards.extend(self.shards_of(rank).zip(of_rank));
        }
        shards.sort_by_key(|(shard, _)| *shard);
        Ok(shards.into_iter().flat_map(|(_, values)| values).collect())
    }

    /// This rank's part of `count` things that are alike: neighbours.
    pub fn part(&self, count: usize) -> Range<usize> {
        self.rank() * count / self.size()..(self.rank() + 1) * count / self.size()
    }

    /// This rank's part of sequences of these lengths: neighbours, about as many tokens as the others have.
    pub fn part_of(&self, lengths: &[usize]) -> Range<usize> {
        shards::cut(lengths, self.size()).swap_remove(self.rank())
    }

    /// How many passes the rank that has the most takes for [its part](Ranks::part_of), where weights are
    /// divided and all have to pass alike; else as many as this rank, and one at least where another has one:
    /// weights may come with it.
    pub fn passes_of(&self, lengths: &[usize], tape: TapeOptions) -> usize {
        let parts = shards::cut(lengths, self.size()).into_iter().enumerate();
        let counted = parts.filter(|(rank, _)| self.divides_weights() || *rank == self.rank());
        let most = counted.map(|(_, part)| micro_batches(&lengths[part], tape).len()).max().unwrap_or(0);
        most.max(usize::from(!lengths.is_empty()))
    }

    /// Where the pieces of a leaf of `len` numbers begin, and where the last ends. They are cut at blocks of
    /// the gradient's norm, so that its partial sums are the same for any number of ranks.
    pub fn cuts(&self, len: usize) -> Vec<usize> {
        cuts(len, self.size())
    }

    /// This rank's piece of a leaf of `len` numbers.
    pub fn piece(&self, len: usize) -> Range<usize> {
        let cuts = self.cuts(len);
        cuts[self.rank()]..cuts[self.rank() + 1]
    }

    /// Everyone's values, by rank.
    pub fn gather<T: Wire>(&self, own: Vec<T>) -> Result<Vec<Vec<T>>, CollectiveError> {
        if self.size() == 1 {
            return Ok(vec![own]);
        }
        let all = self.collective.all_gather_bytes(&own.bytes())?;
        all.iter().enumerate().map(|(rank, bytes)| self.decode(rank, bytes)).collect()
    }

    /// Everyone's values, those of rank 0 first.
    pub fn join<T: Wire>(&self, own: Vec<T>) -> Result<Vec<T>, CollectiveError> {
        Ok(self.gather(own)?.into_iter().flatten().collect())
    }

    /// Whether some rank says yes.
    pub fn any(&self, own: bool) -> Result<bool, CollectiveError> {
        Ok(self.join(vec![own])?.contains(&true))
    }

    /// What rank 0 says; the others' values are not looked at.
    pub fn of_first<T: Wire>(&self, own: T) -> Result<T, CollectiveError> {
        if self.size() == 1 {
            return Ok(own);
        }
        let bytes = if self.is_first() { own.bytes() } else { Vec::new() };
        self.decode(0, &self.collective.broadcast_bytes(0, bytes)?)
    }

    /// Returns once every rank has called it.
    pub fn barrier(&self) -> Result<(), CollectiveError> {
        self.collective.barrier()
    }

    fn decode<T: Wire>(&self, rank: usize, mut bytes: &[u8]) -> Result<T, CollectiveError> {
        let value = T::take(&mut bytes).filter(|_| bytes.is_empty());
        value.ok_or_else(|| CollectiveError::Failed {
            what: format!("reading what rank {rank} sent"),
            reason: "it is not what this rank expects at this place".to_string(),
        })
    }
}

/// A shard of a mini-batch, as its rank computes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shard {
    /// Its micro-batches, as ranges of the sequences of the mini-batch.
    pub micros: Vec<Range<usize>>,
    /// Passes that it takes at least, since other ranks take so many at the same time.
    pub passes: usize,
}

/// [`Ranks::cuts`] for `ranks` ranks.
pub(crate) fn cuts(len: usize, ranks: usize) -> Vec<usize> {
    let blocks = len.div_ceil(SQUARES_BLOCK);
    (0..=ranks).map(|rank| (rank * blocks / ranks * SQUARES_BLOCK).min(len)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_whole_blocks_and_together_the_leaf() {
        for len in [0, 1, 100, SQUARES_BLOCK, SQUARES_BLOCK + 1, 7 * SQUARES_BLOCK - 3] {
            for ranks in [1, 2, 4, 8] {
                let cuts = cuts(len, ranks);
                assert_eq!((cuts[0], cuts[ranks], cuts.len()), (0, len, ranks + 1));
                assert!(cuts.is_sorted());
                assert!(cuts[..ranks].iter().all(|cut| cut % SQUARES_BLOCK == 0 || *cut == len));
            }
        }
    }

    #[test]
    fn ranks_that_do_not_divide_the_shards_are_refused_by_name() {
        let text = std::fs::read_to_string("../../recipes/tiny-grpo.toml").expect("a recipe");
        let of = |ranks: usize, set: &[&str]| {
            let set: Vec<String> = set.iter().map(|s| s.to_string()).collect();
            let recipe = Recipe::parse(&text, "tiny.toml", &set).expect("a recipe");
            let collective = Arc::new(Collective::counted(0, ranks));
            Ranks::new(collective, &recipe).map(|ranks| ranks.shards_each()).map_err(|e| e.to_string())
        };
        assert_eq!(of(1, &[]), Ok(1));
        assert_eq!(of(4, &["trainer.shards=8"]), Ok(2));
        let refused = of(4, &[]).expect_err("one shard");
        for part in ["tiny.toml", "`trainer.shards` is 1", "4 ranks", "trainer.shards = 8"] {
            assert!(refused.contains(part), "{refused}");
        }
        let refused = of(3, &["trainer.shards=8"]).expect_err("three ranks");
        assert!(refused.contains("--set trainer.shards=8") && refused.contains("start 1, 2, 4"), "{refused}");
    }
}
