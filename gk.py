import sys,os,time,subprocess,signal
sys.path.insert(0,'/work/main')
from grpoctl.processes.child import Child
c=Child(["sh","-c","setsid sleep 95 & exec sleep 96"]); time.sleep(.5)
os.kill(c._process.pid, signal.SIGKILL); time.sleep(.5)
print(c.code(), subprocess.run("ps -eo pid,ppid,args | grep '[s]leep 9[56]'",shell=True,capture_output=True,text=True).stdout)
subprocess.run("for p in $(ps -eo pid,args | awk '/sleep 9[56]$/{print $1}'); do kill -9 $p; done",shell=True)
