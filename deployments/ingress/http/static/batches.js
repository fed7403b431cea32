// The newest batches of this key, and how far they are.

import { getJson } from "./api.js";
import { age, showLines } from "./lines.js";

const MOST = 5;
const EVERY = 3; // statuses

const count = (number) => number.toLocaleString("en");

// How far a batch is, or what it ended as.
const noteOf = ({ status, request_counts, expires_at, errors, waits_for }) => {
  const { total, completed, failed } = request_counts;
  if (status === "failed") {
    const [first, ...others] = errors?.data ?? [];
    if (!first) return status;
    const line = first.line === null ? "" : `line ${first.line}: `;
    return `failed: ${line}${first.message}${others.length ? " (and others)" : ""}`;
  }
  const parts = [status.replace("_", " ")];
  if (total) parts.push(`${count(completed)} of ${count(total)} answered`);
  if (failed) parts.push(`${count(failed)} failed`);
  if (status === "in_progress" || status === "cancelling") {
    parts.push(`expires in ${age(Math.max(0, expires_at - Date.now() / 1000))}`);
    if (waits_for) parts.push(`requests are sent again: ${waits_for}`);
  }
  return parts.join(", ");
};

const nameOf = ({ id, status, request_counts: { total, completed, failed } }) => {
  const isUnfinished = status === "in_progress" || status === "cancelling";
  const share = isUnfinished && total ? ` ${Math.floor((100 * (completed + failed)) / total)} %` : "";
  return id.slice(0, "batch_".length + 8) + share;
};

// Batches that run elsewhere: `penstock batch`, also as a job of Ray.
export const showJobs = ({ jobs }) =>
  showLines(
    "jobs",
    jobs.map(({ name, host, state, num_lines, num_completed, num_failed, cause }) => {
      const share = num_lines ? Math.floor((100 * (num_completed + num_failed)) / num_lines) : 100;
      const parts = [`${state} on ${host}`, `${count(num_completed)} of ${count(num_lines)} answered`];
      if (num_failed) parts.push(`${count(num_failed)} failed`);
      if (cause) parts.push(`requests are sent again: ${cause}`);
      return [`${name} ${share} %`, parts.join(", ")];
    }),
  );

export class BatchList {
  #turn = 0;

  // After each status: asks in some of its turns, and only where the server runs batches.
  async renew({ has_batches }) {
    if (!has_batches) return showLines("batches", []);
    if (this.#turn++ % EVERY) return;
    const { data } = await getJson(`v1/batches?limit=${MOST}`);
    showLines("batches", data.map((batch) => [nameOf(batch), noteOf(batch)]));
  }
}
