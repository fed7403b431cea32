#!lua name=penstock_state_1
-- The verbs of Penstock's store that check before they write, each in one step.
-- ../rules.py says the same in Python. What changes here needs a new number in all names, since
-- processes of two versions may share a server.

local function now_us()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000000 + tonumber(time[2])
end

local function whole(number)
  return string.format('%.0f', number)
end

local function live(keys, ttl_ms)
  for _, key in ipairs(keys) do
    if ttl_ms == '' then
      redis.call('PERSIST', key)
    else
      redis.call('PEXPIRE', key, ttl_ms)
    end
  end
end

local function is_expected(found, expect)
  return expect == 'any' or (expect == 'absent' and not found) or found == expect
end

-- keys: value. args: bytes, ttl in ms or '', 'any' | 'absent' | version
local function put(keys, args)
  local found = redis.call('HGET', keys[1], 'version')
  if not is_expected(found, args[3]) then
    return {'conflict', found or ''}
  end
  local version = whole(math.max(now_us(), tonumber(found or '0') + 1))
  redis.call('HSET', keys[1], 'body', args[1], 'version', version)
  live(keys, args[2])
  return {'ok', version}
end

-- keys: value, stream, its head, bucket. args: 'any' | 'absent' | version
local function delete(keys, args)
  local found = redis.call('HGET', keys[1], 'version')
  if not is_expected(found, args[1]) then
    return {'conflict', found or ''}
  end
  redis.call('DEL', unpack(keys))
  return {'ok', ''}
end

-- keys: stream, its head. args: first, fence, ttl in ms or '', keep or '', records ...
-- Record n has the id 0-(n+1).
local function append(keys, args)
  local stream, head = keys[1], keys[2]
  local first, fence, num = tonumber(args[1]), tonumber(args[2]), #args - 4
  local found = redis.call('HMGET', head, 'next', 'fence')
  local next, highest = tonumber(found[1] or '0'), tonumber(found[2] or '0')
  if fence < highest then
    return {'fenced', whole(highest)}
  end
  if first > next then
    return {'gap', whole(next)}
  end
  local old = math.min(next - first, num)
  if old > 0 then
    local range = redis.call(
      'XRANGE', stream, '0-' .. whole(first + 1), '0-' .. whole(first + old))
    for _, entry in ipairs(range) do
      local index = tonumber(string.sub(entry[1], 3)) - 1
      if entry[2][2] ~= args[5 + index - first] then
        return {'differs', whole(index)}
      end
    end
  end
  for i = old + 1, num do
    redis.call('XADD', stream, '0-' .. whole(first + i), 'r', args[4 + i])
  end
  next = math.max(next, first + num)
  if args[4] ~= '' then
    redis.call('XTRIM', stream, 'MINID', '~', '0-' .. whole(math.max(0, next - tonumber(args[4]) + 1)))
  end
  redis.call('HSET', head, 'next', whole(next), 'fence', whole(fence))
  live(keys, args[3])
  return {'ok', whole(next)}
end

-- keys: buckets. args: capacity, refill per s, cost of each. Levels come as texts of 17 digits.
local function take(keys, args)
  local now, wait, levels = now_us() / 1000000, 0, {}
  local is_early = false
  for i, key in ipairs(keys) do
    local capacity, rate, cost = tonumber(args[3*i-2]), tonumber(args[3*i-1]), tonumber(args[3*i])
    local found = redis.call('HMGET', key, 'level', 'at')
    local level = capacity
    if found[1] then
      local at = tonumber(found[2])
      is_early = is_early or at > now
      level = math.min(capacity, tonumber(found[1]) + math.max(0, now - at) * rate)
    end
    if cost > math.max(level, 0) then
      if cost > capacity or rate == 0 then
        wait = math.huge
      else
        wait = math.max(wait, (cost - level) / rate)
      end
    end
    levels[i] = level
  end
  local said = {wait == math.huge and 'inf' or string.format('%.17g', wait)}
  for i, key in ipairs(keys) do
    local capacity, rate, cost = tonumber(args[3*i-2]), tonumber(args[3*i-1]), tonumber(args[3*i])
    local level = levels[i]
    if wait == 0 then
      level = math.min(capacity, level - cost)
    end
    said[i + 1] = string.format('%.17g', level)
    if wait == 0 or is_early then
      redis.call('HSET', key, 'level', said[i + 1], 'at', string.format('%.17g', now))
      live({key}, rate == 0 and '' or whole(math.ceil(((capacity - level) / rate + 1) * 1000)))
    end
  end
  return said
end

redis.register_function('penstock_put_1', put)
redis.register_function('penstock_append_1', append)
redis.register_function('penstock_take_1', take)
redis.register_function{
  function_name = 'penstock_delete_1', callback = delete, flags = {'allow-oom'}}
redis.register_function{
  function_name = 'penstock_about_1', callback = function() return 1 end,
  flags = {'no-writes', 'allow-stale'}}
