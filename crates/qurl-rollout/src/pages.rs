//! The memory of keys and values, in pages of a fixed number of tokens.
//!
//! [`Pages`] are the pages of one sequence in the order of its positions. They are taken from a [`PagePool`],
//! go back to it when dropped, and cannot be cloned: sharing is [`Pages::fork`], which counts the holders of
//! every page. A page with more than one holder is never written to; [`Pages::prepare`] gives the writer a
//! page of its own and says what to copy. The pool has as many pages as the budget allows from the start, so
//! the budget cannot be exceeded.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A content of one page to be copied to another before anything is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageCopy {
    /// The page to read.
    pub from: u32,
    /// The page to write.
    pub to: u32,
}

#[derive(Debug)]
struct State {
    free: Vec<u32>,
    /// Holders of each page.
    holders: Vec<u32>,
    peak: usize,
    /// How often a holder has let a page go.
    given_back: u64,
}

#[derive(Debug)]
struct Shared {
    page_size: usize,
    state: Mutex<State>,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn take(&mut self) -> Option<u32> {
        let page = self.free.pop()?;
        self.holders[page as usize] = 1;
        self.peak = self.peak.max(self.holders.len() - self.free.len());
        Some(page)
    }

    fn release(&mut self, page: u32) {
        self.given_back += 1;
        let holders = &mut self.holders[page as usize];
        *holders -= 1;
        if *holders == 0 {
            self.free.push(page);
        }
    }
}

/// All pages of an engine.
#[derive(Debug)]
pub struct PagePool {
    shared: Arc<Shared>,
}

impl PagePool {
    /// A pool of `total` free pages of `page_size` tokens each (at least one).
    pub fn new(total: usize, page_size: usize) -> PagePool {
        let total = u32::try_from(total).unwrap_or(u32::MAX);
        let state = State {
            free: (0..total).rev().collect(),
            holders: vec![0; total as usize],
            peak: 0,
            given_back: 0,
        };
        PagePool { shared: Arc::new(Shared { page_size: page_size.max(1), state: Mutex::new(state) }) }
    }

    /// Tokens of a page.
    pub fn page_size(&self) -> usize {
        self.shared.page_size
    }

    /// Pages that this many tokens need.
    pub fn pages_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.shared.page_size)
    }

    /// Number of pages.
    pub fn total(&self) -> usize {
        self.shared.state().holders.len()
    }

    /// Pages that nobody holds.
    pub fn free(&self) -> usize {
        self.shared.state().free.len()
    }

    /// Most pages that were held at the same time.
    pub fn peak(&self) -> usize {
        self.shared.state().peak
    }

    /// Sequences that hold a page.
    pub fn holders(&self, page: u32) -> usize {
        self.shared.state().holders.get(page as usize).map_or(0, |&h| h as usize)
    }

    /// How often a holder has let a page go.
    pub fn given_back(&self) -> u64 {
        self.shared.state().given_back
    }

    /// The pages of a sequence that has none yet.
    pub fn empty(&self) -> Pages {
        Pages { ids: Vec::new(), shared: self.shared.clone() }
    }
}

/// The pages of one sequence.
#[derive(Debug)]
pub struct Pages {
    ids: Vec<u32>,
    shared: Arc<Shared>,
}

impl Pages {
    /// Page numbers in the order of positions.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// Where the keys and values of a position lie: page * page size + place in the page.
    ///
    /// # Panics
    /// If no page was taken for the position.
    pub fn slot(&self, position: usize) -> u32 {
        let size = self.shared.page_size;
        self.ids[position / size] * size as u32 + (position % size) as u32
    }

    /// The first `tokens` tokens for one more holder. The last page may be partly filled; whoever writes to
    /// it first gets a copy.
    pub fn fork(&self, tokens: usize) -> Pages {
        let ids = self.ids[..tokens.div_ceil(self.shared.page_size)].to_vec();
        let mut state = self.shared.state();
        for &page in &ids {
            state.holders[page as usize] += 1;
        }
        drop(state);
        Pages { ids, shared: self.shared.clone() }
    }

    /// One of the pages, by its place, for one more holder.
    pub fn fork_page(&self, place: usize) -> Pages {
        let page = self.ids[place];
        self.shared.state().holders[page as usize] += 1;
        Pages { ids: vec![page], shared: self.shared.clone() }
    }

    /// Appends pages of the same pool, for one more holder.
    pub fn extend_fork(&mut self, other: &Pages) {
        let mut state = self.shared.state();
        for &page in &other.ids {
            state.holders[page as usize] += 1;
        }
        drop(state);
        self.ids.extend_from_slice(&other.ids);
    }

    /// Gives back what lies after the first `tokens` tokens.
    pub fn truncate(&mut self, tokens: usize) {
        let keep = tokens.div_ceil(self.shared.page_size).min(self.ids.len());
        let mut state = self.shared.state();
        for page in self.ids.drain(keep..) {
            state.release(page);
        }
    }

    /// Makes the positions `from..to` writable: takes missing pages, and replaces the page of `from` by a
    /// copy where it has other holders. Without enough free pages it returns false, and what it got so far
    /// stays.
    pub fn prepare(&mut self, from: usize, to: usize, copies: &mut Vec<PageCopy>) -> bool {
        let size = self.shared.page_size;
        let mut state = self.shared.state();
        if let Some(id) = self.ids.get_mut(from / size)
            && state.holders[*id as usize] > 1
        {
            let Some(own) = state.take() else { return false };
            copies.push(PageCopy { from: *id, to: own });
            state.release(*id);
            *id = own;
        }
        while self.ids.len() < to.div_ceil(size) {
            let Some(page) = state.take() else { return false };
            self.ids.push(page);
        }
        true
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        self.truncate(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn taken_shared_copied_and_given_back() {
        let pool = PagePool::new(4, 16);
        let mut copies = Vec::new();
        let mut leader = pool.empty();
        assert!(leader.prepare(0, 20, &mut copies));
        assert_eq!((leader.ids(), pool.free(), leader.slot(17)), ([0, 1].as_slice(), 2, 17));
        let mut follower = leader.fork(19);
        assert_eq!((pool.holders(0), pool.holders(1), pool.free()), (2, 2, 2));
        assert!(follower.prepare(19, 20, &mut copies));
        assert_eq!(copies, [PageCopy { from: 1, to: 2 }]);
        assert_eq!((follower.ids(), pool.holders(1)), ([0, 2].as_slice(), 1));
        // The only holder writes in place.
        assert!(leader.prepare(20, 21, &mut copies));
        assert_eq!(copies.len(), 1);
        assert!(!leader.prepare(21, 65, &mut copies), "five pages of four");
        assert_eq!(pool.free(), 0);
        drop(leader);
        assert_eq!((pool.holders(0), pool.free()), (1, 2));
        drop(follower);
        assert_eq!((pool.free(), pool.peak()), (4, 4));
    }

    /// Random takes, forks, truncations and drops against a plain count of holders.
    #[test]
    fn fuzz() {
        let mut state = 7u64;
        let mut random = move |below: usize| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            ((state >> 33) as usize) % below
        };
        let (size, total) = (2, 6);
        let pool = PagePool::new(total, size);
        let mut held: Vec<(Pages, usize)> = Vec::new();
        let mut copies = Vec::new();
        for round in 0..if cfg!(miri) { 300 } else { 100_000 } {
            match random(6) {
                0 => held.push((pool.empty(), 0)),
                1 | 2 if !held.is_empty() => {
                    let at = random(held.len());
                    let (pages, tokens) = &mut held[at];
                    let more = *tokens + 1 + random(3);
                    let free = pool.free();
                    copies.clear();
                    if pages.prepare(*tokens, more, &mut copies) {
                        for &page in &pages.ids()[*tokens / size..] {
                            assert_eq!(pool.holders(page), 1, "round {round}: a shared page is written");
                        }
                        *tokens = more;
                    } else {
                        assert_eq!(pool.free(), 0, "round {round}: refused with {free} free pages");
                    }
                    assert!(copies.len() <= 1);
                }
                3 if !held.is_empty() => {
                    let at = random(held.len());
                    let tokens = random(held[at].1 + 1);
                    let fork = held[at].0.fork(tokens);
                    held.push((fork, tokens));
                }
                4 if !held.is_empty() => {
                    let at = random(held.len());
                    let tokens = random(held[at].1 + 1);
                    held[at].0.truncate(tokens);
                    held[at].1 = tokens;
                }
                _ if !held.is_empty() => {
                    held.swap_remove(random(held.len()));
                }
                _ => {}
            }
            if held.len() > 12 {
                held.clear();
            }
            let mut holders = vec![0; total];
            for page in held.iter().flat_map(|(pages, _)| pages.ids()) {
                holders[*page as usize] += 1;
            }
            for (page, &count) in holders.iter().enumerate() {
                assert_eq!(pool.holders(page as u32), count, "round {round}: page {page}");
            }
            assert_eq!(pool.free(), holders.iter().filter(|&&h| h == 0).count(), "round {round}");
        }
        held.clear();
        assert_eq!(pool.free(), total);
    }
}
