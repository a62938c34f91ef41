//! Pages that hold the beginnings of token sequences, kept for sequences that begin alike.
//!
//! Keys and values of a token depend on it and on the tokens before it alone, to the last bit, whatever
//! request they were computed for. So a page that is full can serve any sequence that begins with the same
//! tokens: a system prompt is computed once, and so is the conversation so far at its next turn.
//!
//! Whole pages form a tree: a node is a page after the page of its parent, found by its tokens themselves, so
//! no two beginnings can be taken for each other. A node holds its page as a sequence does; pages that nobody
//! else holds are given up when others are needed, the longest unused first, and of a sequence's pages the
//! last one first. With a page go those after it, even if they are in use: they could no longer be found, and
//! whoever computed them would bring them a second time. So the tree holds no page twice, and a page with one
//! more holder is in use.
//!
//! A salt stands before the tokens of a first page: beginnings with different salts have no page in common.
//! As all pages have the same number of tokens, no salt can be taken for another one.

use crate::pages::{PagePool, Pages};
use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};

/// The parent of first pages.
const ROOT: u64 = 0;

#[derive(Debug)]
struct Node {
    parent: u64,
    /// Those of the page, after the salt where it is a first one.
    tokens: Box<[u32]>,
    /// One page.
    page: Pages,
    /// Its key in `order`.
    used: u64,
}

/// What a page is found by after its parent.
fn named<'a>(salt: &[u32], parent: u64, page: &'a [u32]) -> Cow<'a, [u32]> {
    match parent {
        ROOT if !salt.is_empty() => Cow::Owned([salt, page].concat()),
        _ => Cow::Borrowed(page),
    }
}

/// The tree.
#[derive(Debug, Default)]
pub struct Prefixes {
    nodes: HashMap<u64, Node>,
    /// Nodes after a parent, by their tokens.
    children: HashMap<u64, HashMap<Box<[u32]>, u64>>,
    /// Nodes by when they were used last.
    order: BTreeMap<u64, u64>,
    /// Numbers given out so far, of nodes and of uses.
    numbers: u64,
    /// How many pages had been given back when all nodes turned out to be in use.
    all_used_at: Option<u64>,
}

impl Prefixes {
    fn number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    /// The nodes of the whole pages that `tokens` begin with, as far as they are here with this salt.
    pub fn find(&self, salt: &[u32], tokens: &[u32], page_size: usize) -> Vec<u64> {
        let mut parent = ROOT;
        let mut path = Vec::new();
        for page in tokens.chunks_exact(page_size) {
            let page = named(salt, parent, page);
            let Some(&node) = self.children.get(&parent).and_then(|after| after.get(&*page)) else { break };
            path.push(node);
            parent = node;
        }
        path
    }

    /// The pages of nodes that [`Prefixes::find`] has just found, for one more holder.
    pub fn fork(&mut self, path: &[u64], pool: &PagePool) -> Pages {
        let mut pages = pool.empty();
        for node in path {
            pages.extend_fork(&self.nodes[node].page);
        }
        self.touch(path);
        pages
    }

    /// Takes note of a use: of the last page first, so that it is also the first to go.
    fn touch(&mut self, path: &[u64]) {
        for node in path.iter().rev() {
            let used = self.number();
            if let Some(at) = self.nodes.get_mut(node) {
                self.order.remove(&at.used);
                at.used = used;
                self.order.insert(used, *node);
            }
        }
    }

    /// Keeps the whole pages of `tokens`, which hold their keys and values; those that are here already stay
    /// as they are.
    pub fn insert(&mut self, salt: &[u32], tokens: &[u32], pages: &Pages, page_size: usize) {
        let mut path = self.find(salt, tokens, page_size);
        let mut parent = path.last().copied().unwrap_or(ROOT);
        for (at, page) in tokens.chunks_exact(page_size).enumerate().skip(path.len()) {
            let (id, used) = (self.number(), self.number());
            let tokens: Box<[u32]> = named(salt, parent, page).into();
            self.children.entry(parent).or_default().insert(tokens.clone(), id);
            self.nodes.insert(id, Node { parent, tokens, page: pages.fork_page(at), used });
            self.order.insert(used, id);
            path.push(id);
            parent = id;
        }
        self.all_used_at = None;
        self.touch(&path);
    }

    /// Gives up the page that was unused longest, of those that nobody else holds; false where there is none.
    pub fn evict(&mut self, pool: &PagePool) -> bool {
        if self.all_used_at == Some(pool.given_back()) {
            return false;
        }
        for _ in 0..self.nodes.len() {
            let Some((_, id)) = self.order.pop_first() else { break };
            let held = self.nodes.get(&id).is_some_and(|node| pool.holders(node.page.ids()[0]) > 1);
            if !held {
                self.remove(id);
                return true;
            }
            // Somebody uses it: that is a use, but no news of when it will be free.
            let now = self.number();
            if let Some(node) = self.nodes.get_mut(&id) {
                node.used = now;
            }
            self.order.insert(now, id);
        }
        self.all_used_at = Some(pool.given_back());
        false
    }

    /// Forgets a node and all after it.
    fn remove(&mut self, id: u64) {
        if let Some(Node { parent, tokens, .. }) = self.nodes.get(&id)
            && let Some(siblings) = self.children.get_mut(parent)
        {
            siblings.remove(tokens);
            if siblings.is_empty() {
                self.children.remove(parent);
            }
        }
        let mut after = vec![id];
        while let Some(id) = after.pop() {
            after.extend(self.children.remove(&id).into_iter().flat_map(HashMap::into_values));
            if let Some(node) = self.nodes.remove(&id) {
                self.order.remove(&node.used);
            }
        }
    }

    /// Forgets everything: the weights have changed.
    pub fn clear(&mut self) {
        *self = Prefixes { numbers: self.numbers, ..Prefixes::default() };
    }

    /// The pages that are kept.
    pub fn pages(&self) -> impl Iterator<Item = &Pages> {
        self.nodes.values().map(|node| &node.page)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(pool: &PagePool, tokens: usize) -> Pages {
        let mut pages = pool.empty();
        assert!(pages.prepare(0, tokens, &mut Vec::new()));
        pages
    }

    #[test]
    fn whole_pages_are_found_by_their_tokens_and_given_up_from_the_end() {
        let pool = PagePool::new(8, 16);
        let mut prefixes = Prefixes::default();
        let tokens: Vec<u32> = (0..40).collect();
        let first = taken(&pool, 40);
        prefixes.insert(&[], &tokens, &first, 16);
        assert_eq!((prefixes.pages().count(), pool.free()), (2, 5), "the third page is not whole");
        let ids = first.ids().to_vec();
        drop(first);
        assert_eq!(pool.free(), 6);

        let path = prefixes.find(&[], &tokens[..33], 16);
        assert_eq!(prefixes.fork(&path, &pool).ids(), &ids[..2]);
        assert_eq!(prefixes.find(&[], &tokens[..31], 16).len(), 1);
        assert_eq!(prefixes.find(&[], &tokens[1..], 16).len(), 0, "the same tokens at other places");
        let mut other = tokens.clone();
        other[20] = 7;
        assert_eq!(prefixes.find(&[], &other, 16).len(), 1);

        // A page in use stays, the others go from the end on.
        let held = prefixes.fork(&path[..1], &pool);
        assert!(prefixes.evict(&pool));
        assert_eq!((prefixes.find(&[], &tokens, 16).len(), pool.free()), (1, 7));
        assert!(!prefixes.evict(&pool) && !prefixes.evict(&pool));
        drop(held);
        assert!(prefixes.evict(&pool) && prefixes.pages().count() == 0);
        assert_eq!(pool.free(), 8);
    }

    /// The same tokens with another salt, or with none, are another beginning.
    #[test]
    fn salts_share_nothing() {
        let pool = PagePool::new(8, 4);
        let mut prefixes = Prefixes::default();
        let tokens: Vec<u32> = (0..8).collect();
        prefixes.insert(&[3], &tokens, &taken(&pool, 8), 4);
        let found = |prefixes: &Prefixes, salt: &[u32]| prefixes.find(salt, &tokens, 4).len();
        assert_eq!([found(&prefixes, &[3]), found(&prefixes, &[]), found(&prefixes, &[3, 3])], [2, 0, 0]);
        // A salt and the tokens after it are not the same as another salt and fewer tokens.
        assert_eq!(prefixes.find(&[], &[&[3], &tokens[..]].concat(), 4).len(), 0);
        prefixes.insert(&[], &tokens, &taken(&pool, 8), 4);
        assert_eq!((prefixes.pages().count(), found(&prefixes, &[])), (4, 2));
        while prefixes.evict(&pool) {}
        assert_eq!((prefixes.pages().count(), pool.free()), (0, 8));
    }

    /// Two compute the same pages, and the first of them brings only the beginning. Where that is given up,
    /// what the other has brought cannot be found, and comes again.
    #[test]
    fn no_page_is_held_twice() {
        let pool = PagePool::new(8, 16);
        let mut prefixes = Prefixes::default();
        let tokens: Vec<u32> = (0..48).collect();
        let (first, second) = (taken(&pool, 48), taken(&pool, 48));
        prefixes.insert(&[], &tokens[..16], &first, 16);
        prefixes.insert(&[], &tokens, &second, 16);
        drop(first);
        assert!(prefixes.evict(&pool));
        assert_eq!((prefixes.pages().count(), pool.free()), (0, 5), "those after it are gone, too");
        prefixes.insert(&[], &tokens, &second, 16);
        assert!(second.ids().iter().all(|&page| pool.holders(page) == 2));
        drop(second);
        while prefixes.evict(&pool) {}
        assert_eq!(pool.free(), 8);
    }

    #[test]
    fn nothing_is_left_of_pages_that_were_forgotten() {
        let pool = PagePool::new(8, 16);
        let mut prefixes = Prefixes::default();
        let tokens: Vec<u32> = (0..48).collect();
        prefixes.insert(&[], &tokens, &taken(&pool, 48), 16);
        prefixes.insert(&[], &tokens, &taken(&pool, 48), 16);
        assert_eq!((prefixes.pages().count(), pool.free()), (3, 5), "the second copy is not needed");
        prefixes.clear();
        assert_eq!((prefixes.pages().count(), prefixes.find(&[], &tokens, 16).len(), pool.free()), (0, 0, 8));
    }
}
