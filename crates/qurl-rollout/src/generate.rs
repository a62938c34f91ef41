//! The engine as one call: all requests at once, groups in their order or as they finish.

use crate::engine::Engine;
use crate::error::RolloutError;
use crate::request::{Group, Request, RequestId};
use qurl_kernels::Device;

impl<D: Device> Engine<D> {
    /// Serves all requests and returns their groups in the same order. If one of them is refused or fails,
    /// all of them are dropped. Groups of earlier requests that finish meanwhile stay for
    /// [`Engine::finished`].
    pub fn generate(
        &mut self,
        queue: &mut D::Queue,
        requests: &[Request],
    ) -> Result<Vec<Group>, RolloutError> {
        let mut groups: Vec<Option<Group>> = requests.iter().map(|_| None).collect();
        self.generate_each(queue, requests, &mut |number, group| {
            groups[number] = Some(group);
            true
        })?;
        Ok(groups.into_iter().flatten().collect())
    }

    /// The same, where `give` gets every group as soon as it is finished, with the number of its request.
    /// Where it answers that no more are wanted, the requests that are left are dropped.
    pub fn generate_each(
        &mut self,
        queue: &mut D::Queue,
        requests: &[Request],
        give: &mut dyn FnMut(usize, Group) -> bool,
    ) -> Result<(), RolloutError> {
        for request in requests {
            self.check(request)?;
        }
        let mut ids = Vec::with_capacity(requests.len());
        for request in requests {
            ids.push(self.submit(request.clone())?);
        }
        let mut others = Vec::new();
        let result = self.run(queue, &ids, give, &mut others);
        self.put_back(others);
        // What has finished is not there any more.
        for &id in &ids {
            self.cancel(id);
        }
        result
    }

    fn run(
        &mut self,
        queue: &mut D::Queue,
        ids: &[RequestId],
        give: &mut dyn FnMut(usize, Group) -> bool,
        others: &mut Vec<Group>,
    ) -> Result<(), RolloutError> {
        let (mut given, mut wanted) = (0, true);
        while wanted && given < ids.len() {
            let stepped = self.step(queue).map(|_| ());
            for group in self.finished() {
                match ids.binary_search(&group.request) {
                    Ok(number) => {
                        given += 1;
                        wanted = wanted && give(number, group);
                    }
                    Err(_) => others.push(group),
                }
            }
            stepped?;
        }
        Ok(())
    }
}
