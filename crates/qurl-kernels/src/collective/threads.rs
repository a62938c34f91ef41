//! Ranks as threads of one process: messages go through a table in memory. For tests of what ranks compute.

use super::CollectiveError;
use super::transport::{Receive, Send};
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

/// What all ranks share.
#[derive(Default)]
struct Post {
    mail: Mutex<Mail>,
    changed: Condvar,
}

#[derive(Default)]
struct Mail {
    /// Messages not yet received, in order, by sender and receiver.
    messages: HashMap<(usize, usize), VecDeque<Vec<u8>>>,
    /// Ranks that have ended.
    gone: Vec<usize>,
}

/// One of the ranks.
pub(crate) struct Threads {
    rank: usize,
    size: usize,
    post: Arc<Post>,
}

impl Threads {
    pub fn all(size: usize) -> Vec<Threads> {
        let post = Arc::new(Post::default());
        (0..size).map(|rank| Threads { rank, size, post: post.clone() }).collect()
    }

    pub fn exchange(&self, sends: &[Send], receives: &mut [Receive]) -> Result<(), CollectiveError> {
        let mut mail = self.post.mail.lock().unwrap_or_else(PoisonError::into_inner);
        for send in sends {
            mail.messages.entry((self.rank, send.to)).or_default().push_back(send.bytes.to_vec());
        }
        self.post.changed.notify_all();
        for receive in receives {
            let message = loop {
                if let Some(message) =
                    mail.messages.get_mut(&(receive.from, self.rank)).and_then(VecDeque::pop_front)
                {
                    break message;
                }
                if mail.gone.contains(&receive.from) {
                    let reason = "its thread has ended".to_string();
                    return Err(CollectiveError::Lost { rank: receive.from, size: self.size, reason });
                }
                mail = self.post.changed.wait(mail).unwrap_or_else(PoisonError::into_inner);
            };
            assert_eq!(
                message.len(),
                receive.bytes.len(),
                "bytes from rank {} to {}",
                receive.from,
                self.rank
            );
            receive.bytes.copy_from_slice(&message);
        }
        Ok(())
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.post.mail.lock().unwrap_or_else(PoisonError::into_inner).gone.push(self.rank);
        self.post.changed.notify_all();
    }
}
