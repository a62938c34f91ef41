//! The engine as one call: all requests at once, groups in their order.

use crate::engine::Engine;
use crate::error::RolloutError;
use crate::request::{Group, Request, RequestId};
use qurl_kernels::Device;
use std::collections::BTreeMap;

impl<D: Device> Engine<D> {
    /// Serves all requests and returns their groups in the same order. If one of them is refused or fails,
    /// all of them are dropped. Groups of earlier requests that finish meanwhile stay for
    /// [`Engine::finished`].
    pub fn generate(
        &mut self,
        queue: &mut D::Queue,
        requests: &[Request],
    ) -> Result<Vec<Group>, RolloutError> {
        for request in requests {
            self.check(request)?;
        }
        let mut ids = Vec::with_capacity(requests.len());
        for request in requests {
            ids.push(self.submit(request.clone())?);
        }
        let mut groups = BTreeMap::new();
        let result = self.run(queue, &ids, &mut groups);
        if let Err(error) = result {
            for &id in &ids {
                self.cancel(id);
            }
            return Err(error);
        }
        Ok(ids.iter().filter_map(|id| groups.remove(id)).collect())
    }

    fn run(
        &mut self,
        queue: &mut D::Queue,
        ids: &[RequestId],
        groups: &mut BTreeMap<RequestId, Group>,
    ) -> Result<(), RolloutError> {
        let mut others = Vec::new();
        while groups.len() < ids.len() {
            let stepped = self.step(queue).map(|_| ());
            for group in self.finished() {
                match ids.binary_search(&group.request) {
                    Ok(_) => _ = groups.insert(group.request, group),
                    Err(_) => others.push(group),
                }
            }
            if let Err(error) = stepped {
                self.put_back(others);
                return Err(error);
            }
        }
        self.put_back(others);
        Ok(())
    }
}
